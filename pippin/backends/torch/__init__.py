"""Everything that touches torch."""

from pippin.config import prepare_openmp

prepare_openmp()
