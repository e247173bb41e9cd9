import sys

if (mine := sys.version_info[:2]) < (3, 10):  # before the imports, which would fail
    print(
        "error    python: {}.{} is too old: 3.10 to 3.13 work".format(*mine),
        "fix: PYTHON=/path/to/python3.12 bash setup.sh",
        sep=" | ",
    )
    sys.exit(1)
