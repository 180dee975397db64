"""What is opened beside the engine is opened as the settings say."""

from pathlib import Path

import pytest

from runtime import OffloadConfig, Runtime, RuntimeConfig
from runtime.config.settings import KVConfig, KVTier, MachineConfig
from runtime.errors import KVFileError
from runtime.units import MIB


def test_the_file_of_keys_and_values_is_read_as_weights_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: dict[str, object] = {}

    def open_file(layout: object, **settings: object) -> None:
        opened.update(settings)
        raise KVFileError("seen")

    monkeypatch.setattr("runtime.engine.setup.KVFile", open_file)
    config = RuntimeConfig(
        offload=OffloadConfig(reader_threads=3, read_chunk_mib=2, direct_io=False),
        kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0, directory=str(tmp_path)),
        machine=MachineConfig(device="cpu"),
    )
    with pytest.raises(KVFileError, match="seen"):
        Runtime(config).generate([[7, 8, 9]])
    assert opened == {"directory": str(tmp_path), "num_threads": 3, "chunk_bytes": 2 * MIB, "direct": False}
