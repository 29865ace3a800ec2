"""The pages and the HTTP interface of the service."""
