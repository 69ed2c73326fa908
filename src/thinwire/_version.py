"""The version, where every module may import it from."""

from importlib.metadata import version

__version__ = version("thinwire")
