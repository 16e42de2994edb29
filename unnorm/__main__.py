"""`python -m unnorm` is the command line."""

from unnorm.cli import main

if __name__ == "__main__":
    main()
