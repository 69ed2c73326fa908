"""`python -m thinwire`, and with it `torchrun ... -m thinwire plan`: the command line."""

from thinwire.cli.app import main

if __name__ == "__main__":
    main()
