"""Model files on disk: finding, fetching, reading. No backend's arrays, no network but the hub."""
