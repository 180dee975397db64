"""Makes the reference of settings from the files and comments of conf/, as `weightstream JOB --help` does."""

from collections.abc import Iterator

from jobs.config.help import JobSettings, format_value, option_names, read_option

# Commands with a section of their own. A group of settings has one page, with the defaults of the first command here.
JOBS = ("generate", "score", "encode", "plan", "pack", "export", "report", "status", "metrics", "measure", "synthesize")
JOBS += ("evaluate", "serve", "models", "trace")


def group_pages() -> dict[str, str]:
    """Markdown by page name: a page for each group of settings, and one for the keys of commands outside of groups."""
    pages, commands = dict[str, str](), ["# Settings of each command", ""]
    commands += ["Keys that belong to no group. Groups such as `model` and `offload` have pages of their own.", ""]
    shown = set[str]()
    for job in JOBS:
        settings = JobSettings(job, [])
        for group in settings.groups:
            name = f"reference/settings/{group}.md"
            if name not in pages and "/" not in group:
                pages[name] = "\n".join(_group_page(settings, group))
        rows = [key for key in settings.leaf_keys() if key.partition(".")[0] not in settings.groups]
        rows = [key for key in rows if key not in shown]
        commands += [f"## {job}", "", *_table(settings, rows), ""]
        shown.update(rows)
    pages["reference/settings/commands.md"] = "\n".join(commands)
    return pages


def _group_page(settings: JobSettings, group: str) -> Iterator[str]:
    yield from (
        f"# {group}",
        "",
        f"Choose one with `{group}=NAME`; the default is `{settings.selected_option(group)}`.",
        "",
    )
    yield from ("| option | meaning |", "|---|---|")
    for option in option_names(group):
        about = " ".join(line.strip() for line in read_option(group, option).header if line.strip())
        yield f"| `{group}={option}` | {_cell(about)} |"
    yield from ("", "## Keys", "")
    yield from _table(settings, settings.leaf_keys(group))


def _table(settings: JobSettings, keys: list[str]) -> Iterator[str]:
    if not keys:
        return
    yield from ("| key | default | choices | meaning |", "|---|---|---|---|")
    for key in keys:
        choices, meaning = settings.choices(key), settings.description(key)
        meaning = meaning.removeprefix(" | ".join(choices)).lstrip(": ") if len(choices) > 1 else meaning
        listed = ", ".join(f"`{choice}`" for choice in choices)
        yield f"| `{key}` | `{_cell(format_value(settings.value_at(key)))}` | {listed} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
