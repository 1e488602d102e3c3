"""`regard translate --in --out`: large files and folders of files, in parts that survive a kill."""
