"""`python -m bevctl` is the same program as `bevctl`."""

from bevctl.cli.main import main

if __name__ == "__main__":
    main()
