// Browsers start no Worker from file://. There the search runs in a hidden frame, behind the same interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      this.inner = inner
      inner.postMessage = data => setTimeout(() => {
        const event = new MessageEvent("message", { data })
        this.onmessage?.(event)
        this.dispatchEvent(event)
      })
      this.loaded = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = new URL(url, document.baseURI)
        script.onload = resolve
        script.onerror = reject
        inner.document.head.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
