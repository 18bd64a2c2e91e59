"""Helpers of the tests: named graphs, a float64 oracle and the accuracy criterion."""
