"""The storage formats: each module here has `FORMATS`, and `METHODS` where configs name it and its tensors have other
names than the weight; it is found by lying here. Here belongs what knows one format; the noun lies beside this folder.
"""
