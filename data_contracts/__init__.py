"""Great Expectations suites and the code that runs them."""
