"""``thinwire selftest``: is thinwire right, and is it fast, on this machine?"""
