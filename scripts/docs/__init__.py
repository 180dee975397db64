"""Makes the pages of the documentation site: those of docs/, and a reference of settings from conf/."""
