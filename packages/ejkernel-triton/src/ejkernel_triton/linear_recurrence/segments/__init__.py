"""States at the start of the segments of a long row, which run at the same time; both recurrences use them."""
