"""Tables of prompts that data engines hand over: Ray Data, Spark, Daft and datatrove call `TableGenerator` with rows,
and have results beside them. Here belongs what such an engine's way of calling asks for; none of them is imported.
"""

from .generator import TableGenerator

__all__ = ["TableGenerator"]
