"""Nothing here is a test: the tests import it, and each script can be run for longer than they do."""

collect_ignore_glob = ["*.py"]
