"""Measuring robustness: attacks on one side, verdicts on fresh draws on the other."""
