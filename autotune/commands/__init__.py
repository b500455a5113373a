"""The command line, one module a command; those of larger parts lie with them (`bench`, `report`,
`what_if`). Heavy packages are imported by the commands that need them."""
