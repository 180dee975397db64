"""The pages of the documentation site: those of docs/, and a reference of settings generated from conf/."""
