"""What the project's own test runs need: which tests can run here, which belong to which command, where time goes."""
