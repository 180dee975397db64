# Weightstream in a container, with the versions of constraints.txt. Run in the root of a checkout or of an unpacked sdist:
#   docker build -t weightstream .
#   docker build -t weightstream:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg TORCH=cuda .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" -v "$HOME/.cache:/cache" weightstream generate dataset.path=prompts.jsonl
# With a GPU: docker run --gpus all, and the image weightstream:cuda. With --user the results are yours; without it, the
# user of the image cannot write to a mounted directory. /cache keeps downloaded models and compiled kernels.
# BASE: Debian or Ubuntu with Python 3.11 or newer. TORCH: cpu or cuda; the CUDA build brings the libraries of CUDA.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TORCH=cpu
ARG EXTRAS=gguf,sentencepiece,structured,s3,serve,eval
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY conf ./conf
COPY jobs ./jobs
COPY runtime ./runtime
COPY weightstream ./weightstream
COPY scripts/install_image.sh ./
RUN sh install_image.sh
# Like /tmp, the cache is writable for every user that --user may name; each makes directories of its own in it.
RUN useradd --create-home --uid 10001 weightstream && mkdir -m 1777 /cache
ENV PATH=/opt/weightstream/bin:$PATH XDG_CACHE_HOME=/cache
USER 10001
WORKDIR /work
ENTRYPOINT ["weightstream"]
CMD ["--help"]
