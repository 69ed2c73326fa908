"""The ``thinwire`` command. Nothing in the library imports it; it needs the ``cli`` extra."""
