from tests.certificates import no_certificates  # noqa: F401  a fixture of all tests
