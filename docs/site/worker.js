// Pages that are opened as files may not start a Worker, which the search of the site needs. There, this one runs its
// script in a hidden frame. Material for MkDocs loads it in place of a script of another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const script = `
        self = window;
        window.importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          script.onerror = reject;
          document.body.appendChild(script);
        })), Promise.resolve());
        window.postMessageToPage = (data) => parent.dispatchWorkerMessage("${url}", data);
        window.postMessage = window.postMessageToPage;`;
      Worker.open.set(String(url), this);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<body><script>${script}<\/script><script src="${url}"><\/script></body>`;
      this.frame.onload = () => {
        this.ready = true;
        this.waiting.forEach((data) => this.postMessage(data));
      };
      document.body.appendChild(this.frame);
    }
    postMessage(data) {
      if (!this.ready) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
  Worker.open = new Map();
  window.dispatchWorkerMessage = (url, data) => {
    const worker = Worker.open.get(url);
    const event = new MessageEvent("message", { data });
    worker.dispatchEvent(event);
    if (worker.onmessage) worker.onmessage(event);
  };
}
