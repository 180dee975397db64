"""What transformers may see of a stranger's directory: a folder with vetted JSON and links to vocabularies. No code
lies in it, no pickle and no weights, and no setting in it names any."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import CheckpointError
from ..store.json_object import read_json_object, require_regular
from ..units import MIB
from .config_rules import require_sound, without_code

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
VETTED = (CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "processor_config.json")
VOCABULARIES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe"}
TEMPLATES = "additional_chat_templates"
MAX_SETTINGS_BYTES = 8 * MIB


@contextmanager
def vetted_directory(directory: Path) -> Iterator[Path]:
    """Raises CheckpointError naming file and key; what it yields is gone behind the `with`. A CheckpointError inside is
    made one about a broken tokenizer.json where there is such a file."""
    with TemporaryDirectory(prefix="millrace-") as home:
        view = Path(home)
        for file in directory.iterdir():
            if file.name in VETTED:
                values = without_code(read_json_object(file, max_bytes=MAX_SETTINGS_BYTES))
                if file.name == CONFIG:
                    require_sound(values, file)
                (view / file.name).write_text(json.dumps(values), encoding="utf-8")
            elif file.suffix in VOCABULARIES and file.exists() and not file.is_dir():
                require_regular(file)
                (view / file.name).symlink_to(file.absolute())
            elif file.name == TEMPLATES:
                (view / file.name).symlink_to(file.absolute())
        try:
            yield view
        except CheckpointError as error:
            if (directory / TOKENIZER).exists():
                read_json_object(directory / TOKENIZER)  # at times it is this simple, and then the file has a name
            raise CheckpointError(str(error).replace(str(view), str(directory))) from error
