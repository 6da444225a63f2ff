/* The search runs in a Web Worker, which browsers refuse to pages that are opened as files. There a
   hidden frame does a worker's work: it loads the script and passes messages both ways. Material's
   script finds the parts for Chinese text if the class is also called IFrameWorker. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.ready = this.load(url)
      this.ready.catch(() => this.dispatchEvent(new ErrorEvent("error")))
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        this.frame.contentDocument.body.append(script)
      })
    }

    postMessage(data) {
      const pass = () =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      this.ready.then(pass, () => {})
    }

    terminate() {
      this.frame.remove()
    }
  }
}
