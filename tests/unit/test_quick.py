from pathlib import Path

from tests.quick import chosen, imports_of


def test_tests_nearest_to_a_changed_module_come_first():
    files = chosen(["services/scheduler/core/kv_cache.py"])
    assert files[0] == "tests/unit/scheduler/test_kv_cache.py"
    assert "tests/simulation/test_seeds.py" in files  # through tests/simulation/world.py and the core
    assert not [file for file in files if file.startswith("tests/unit/native")]


def test_members_in_parentheses_are_imports(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text("from protocol import (\n    codec,\n    steps as messages,\n)\nimport services.units\n")
    assert imports_of(file) == {"protocol/__init__.py", "protocol/codec.py", "protocol/steps.py", "services/units.py"}
