"""A contract that import-linter lacks: a list of the allowed imports instead of the forbidden ones."""

import sys
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class OnlyExternal(Contract):
    """`source` imports no external packages except `allowed` and the standard library."""

    source = fields.StringField()
    allowed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        own = {name.split(".")[0] for name in self.session_options["root_packages"]}
        permitted = own | sys.stdlib_module_names | self.allowed
        broken = sorted(
            (importer, imported)
            for importer in {self.source} | graph.find_descendants(self.source)
            for imported in graph.find_modules_directly_imported_by(importer)
            if imported.split(".")[0] not in permitted
        )
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(
                f"{importer} imports {imported}; only {', '.join(sorted(self.allowed))} may be imported."
            )
