"""Table adapter for data engines: Ray Data, Spark, Daft and datatrove call `TableGenerator` with rows and get results.
No engine is imported.
"""

from .generator import TableGenerator

__all__ = ["TableGenerator"]
