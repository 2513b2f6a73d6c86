"""Words that every other component uses: errors, element types, reductions, identities, addresses.

Anyone may import it; it imports the standard library and NumPy only.
"""
