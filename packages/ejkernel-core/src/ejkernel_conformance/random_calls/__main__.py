"""`python3 -m ejkernel_conformance.random_calls`."""

from ejkernel_conformance.random_calls.command import main

if __name__ == "__main__":
    main()
