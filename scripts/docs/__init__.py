"""The pages that the documentation site is built from: those of docs/, and a reference of settings made from conf/."""
