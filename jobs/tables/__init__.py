"""Table adapter for data engines: Ray Data, Spark, Daft and datatrove call `TableGenerator`. Imports no engine."""

from .generator import TableGenerator

__all__ = ["TableGenerator"]
