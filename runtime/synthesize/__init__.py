"""Random checkpoints of real architectures with tokenizers, in the hub's layout. Code that creates models for tests,
demonstrations and measurements belongs here."""
