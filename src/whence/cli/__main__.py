"""`python -m whence.cli`."""

from whence.cli.app import main

if __name__ == "__main__":
    main()
