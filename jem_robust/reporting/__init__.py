"""Results as files and figures."""
