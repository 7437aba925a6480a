"""What happens to a finding: it is shrunk, shown, written to a file, replayed, or known already.

`program` shows it as calls, `script` in the calls of the tested manager, and `svg` as a drawing.
"""
