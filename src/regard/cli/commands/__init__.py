"""One file per subcommand of `regard`."""
