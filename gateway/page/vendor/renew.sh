#!/usr/bin/env bash
# Renews the libraries beside this file from npm: `make vendor`. package.json names their versions,
# package-lock.json has npm's hashes of the packages, SHA256SUMS those of the files taken from them.
# To take newer versions, write them into package.json and remove package-lock.json first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
languages="bash c cpp css diff go java javascript json markdown python rust sql typescript xml yaml"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/package.json" "$work"
cd "$work"
quiet="--ignore-scripts --omit=optional --no-audit --no-fund --loglevel=error"
if [ -e "$here/package-lock.json" ]; then
  cp "$here/package-lock.json" .
  npm ci $quiet
else
  npm install --omit-lockfile-registry-resolved $quiet
  cp package-lock.json "$here"
fi

cd node_modules
cp marked/lib/marked.esm.js "$here/marked.js"
cp marked/LICENSE "$here/marked.LICENSE"
cp dompurify/dist/purify.min.js "$here/purify.js"
cp dompurify/LICENSE "$here/purify.LICENSE"
cp @highlightjs/cdn-assets/es/core.min.js "$here/highlight.js"
cp @highlightjs/cdn-assets/LICENSE "$here/highlight.LICENSE"
rm -rf "$here/languages"
mkdir "$here/languages"
for name in $languages; do
  cp "@highlightjs/cdn-assets/es/languages/$name.min.js" "$here/languages/$name.js"
done
cd "$here"
sha256sum -- *.js *.LICENSE languages/*.js >SHA256SUMS
