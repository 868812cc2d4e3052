"""`python -m autoshard` is the command `autoshard`."""

from autoshard.experiments.console.commands import main

if __name__ == "__main__":
    main()
