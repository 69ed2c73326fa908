"""Local steps with workers that come and go: torchft decides who is in the run (`pip install thinwire[elastic]`)."""

from thinwire.elastic.local_steps import ElasticLocalSteps

__all__ = ["ElasticLocalSteps"]
