"""One module a subcommand: parse, call, print. Torch is imported when a command runs, never for --help."""
