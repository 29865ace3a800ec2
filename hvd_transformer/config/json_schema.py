"""JSON schema of a `--config` FILE: editors complete its keys, explain them, and mark mistakes.

Made from the typed schema. It accepts what `load` reads from a file: `none` or null where a key may have no value,
numbers as names, and dotted keys. It knows nothing of settings that contradict each other (`config.checks`).
"""

from typing import Any

from hvd_transformer.config.schema import KEYS, SECTIONS, Config, built_in

Schema = dict[str, Any]

# Draft 7, without references: what all editors understand.
_DRAFT = "http://json-schema.org/draft-07/schema#"
# Editors offer the first; `load` takes any case.
_NONE: list[Schema] = [
    {"enum": ["none", None]},
    {"type": "string", "pattern": "^([Nn][Oo][Nn][Ee]|[Nn][Uu][Ll][Ll])$"},
]
# YAML 1.1 reads 1e-3, which has no point, as text, whose range no schema can check.
_EXPONENT = r"^[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"


def json_schema() -> Schema:
    """The schema of a configuration file, without unknown keys."""
    made = Config.model_json_schema()
    sections = made["$defs"]
    properties = {}
    for name, entry in made["properties"].items():
        properties[name] = _section(sections[entry["$ref"].rpartition("/")[2]]) if name in SECTIONS else _key(entry)
    dotted = {}  # not properties, which editors would offer
    for key in KEYS:
        section, _, name = key.rpartition(".")
        if section:
            dotted[rf"^{section}\.{name}$"] = {"$ref": f"#/properties/{section}/properties/{name}"}
    return {
        "$schema": _DRAFT,
        "title": "hvd-train --config FILE",
        "description": made["description"],
        **_table(properties),
        "patternProperties": dotted,
    }


def _section(made: Schema) -> Schema:
    properties = {name: _key(entry) for name, entry in made["properties"].items()}
    return {"description": made["description"], **_table(properties)}


def _table(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key(made: Schema) -> Schema:
    """One key: its description, with what is allowed where types do not say it, its default and its type."""
    allowed = made["allowed"]
    description = made["description"] + (f" (must be {allowed})" if allowed else "")
    ours = ("title", "description", "default", "allowed", "may_change")
    kind = {name: value for name, value in made.items() if name not in ours}
    return {"description": description, "default": made["default"], **_type(kind)}


def _type(made: Schema) -> Schema:
    """Pydantic's type of a value, widened to what `load` makes of words and numbers."""
    if "anyOf" in made:
        kinds = [_type(kind) for kind in made["anyOf"] if kind != {"type": "null"}]
        return {"anyOf": kinds + (_NONE if {"type": "null"} in made["anyOf"] else [])}
    kind = made.get("type")
    if kind == "number":
        return {**made, "type": ["number", "string"], "pattern": _EXPONENT}
    if "pattern" in made:
        return {"anyOf": [{"enum": built_in(made["pattern"])}, made]}
    if kind == "string" and not {"enum", "const"} & made.keys():
        return {**made, "type": ["string", "number"]}
    if "prefixItems" in made:  # a tuple of equal items; draft 7 has no prefixItems
        (items,) = {str(item): item for item in made["prefixItems"]}.values()
        return {name: value for name, value in made.items() if name != "prefixItems"} | {"items": _type(items)}
    inner = {name: _type(made[name]) for name in ("items", "additionalProperties") if isinstance(made.get(name), dict)}
    return made | inner
