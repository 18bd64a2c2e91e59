"""What tests share: named graphs, a float64 oracle and the accuracy criterion."""
