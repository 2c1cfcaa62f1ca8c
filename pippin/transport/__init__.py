"""Moving frames between processes and machines."""
