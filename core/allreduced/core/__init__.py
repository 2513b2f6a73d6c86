"""Words that every other component uses: errors, element types, reductions, identities, addresses, limits, few logs.

Anyone may import it; it imports the standard library and NumPy only.
"""
