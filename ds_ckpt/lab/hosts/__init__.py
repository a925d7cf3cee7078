"""Places to run experiments: emulated nodes, the machines of a hostfile, or this machine alone."""
