"""Training JEMs and plain classifiers."""
