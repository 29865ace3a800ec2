"""The sections of the configuration, one file each; `config.schema` puts them together."""
