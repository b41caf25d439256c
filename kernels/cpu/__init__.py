"""CPU reference operations over decoded experts."""
