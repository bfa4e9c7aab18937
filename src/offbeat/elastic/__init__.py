"""Workers that come and go: who takes part in a round, and how one that joins receives the state."""

from offbeat.elastic.group import Elastic
from offbeat.elastic.scripted import Scripted

__all__ = ["Elastic", "Scripted"]
