"""Everything that imports triton: a step of the scan or an operation around it a file."""
