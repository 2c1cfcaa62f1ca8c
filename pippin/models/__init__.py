"""Model files on disk: finding, fetching, reading. No arrays of a backend, no network but the hub."""
